"""The supervisor process of an elastic run.

``supervisor`` runs the event loop: it reports events to the membership and carries out the decisions.
``service_clients`` sends requests to the checkpoint service and the compile service. ``memory_demand`` chooses a
directory for the states of processes before a run starts, and ``fault_injection`` parses and schedules injected faults.
"""
