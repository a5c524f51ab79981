"""Faults in a system with real engines, as `./triptych up` leaves it, and the look at what it holds."""
