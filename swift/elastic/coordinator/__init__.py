"""The supervisor of a run of several processes.

``supervisor`` runs it to its end. ``membership_driver`` reports what happens to the membership and carries out its
decisions. The clients send requests to the checkpoint service and the compile service, which ``service_monitor``
watches. ``run_spec``, ``memory_demand`` and ``fault_injection`` have what is settled before a run starts.
"""
