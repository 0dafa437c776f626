"""The supervisor of a run of several processes.

``supervisor`` runs it to its end. ``supervisor`` reports what happens to the membership and carries out its
decisions. The clients send requests to the checkpoint service and the compile service, which ``supervisor``
watches. ``supervisor``, ``memory_demand`` and ``fault_injection`` have what is settled before a run starts.
"""
