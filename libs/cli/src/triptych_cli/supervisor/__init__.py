"""Runs a topology: child processes with readiness, restarts and a stop that leaves nothing behind."""
