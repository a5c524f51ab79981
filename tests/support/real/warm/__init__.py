"""Engines that start in seconds: forked from a process that has imported torch and vLLM already.

An engine's start is for the most part the import of torch and vLLM, once in the service and once in
EngineCore. Here one process imports them once, for all engines of a test session:

    pytest ──▶ server ──fork──▶ `up` ──▶ server ──fork──▶ supervisor ──▶ server ──fork──▶ services
                                                     each service ──its own fork server──▶ EngineCore

What is forked becomes what `python -m MODULE` would have been: session, environment, folder, output,
arguments, exit code. What would be imported in another way is started as users start it: see `preload`.

messages         between the server and whoever asks it
preload          in the server: what it imports, and the environment that counts while it does
server           the process that forks, and what becomes of a forked one
client           asks it; a process that it forked
processing_calls in every process: notes calls of models' processors, for tests that count them
unchecked_items  in every process: switches an encoder's check of items off, while a test wants it
patches          a forked launcher forks its supervisor, and that one its services
engine_process   a forked service forks EngineCore
"""
