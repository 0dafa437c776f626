"""The supervisor of a run of several processes.

``supervisor`` runs it to its end: it reports what happens to the membership and carries out its decisions.
``service_clients`` sends requests to the checkpoint service and the compile service. ``memory_demand`` chooses where
the states of processes go before a run starts, and ``fault_injection`` has the faults that a run is to get.
"""
