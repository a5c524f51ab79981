"""Structured outputs: a caller's schema, regular expression or grammar is compiled where it can be ended.

    host (prefill_decode)              compile server           a process for each grammar
    GrammarCompiler --socket, memfd--> fork ------------------> xgrammar, within CPU time, memory and stack
          <------------------------------- CPU time, or why not, or the end of the process
    EngineCore: vLLM compiles it again, a slow one in a thread apart; the slowest are read from the memfd

The server imports xgrammar once and has no threads, so that a fork costs milliseconds and a crash, a timeout
or a lack of memory ends one process that serves one request.

compile_server  the server and the processes that it forks: imports xgrammar alone, no vLLM.
grammar_job     host -> server: one grammar to compile; what vLLM's parameters ask for.
compiler        host: `GrammarCompiler`, the server's client: deadline, turns of tenants, what has compiled.
checked         host: the engine's client takes no request whose grammar has not been compiled there.
compiled        EngineCore: slow grammars in a thread apart, and compiled ones from the host.
allowance       what a request's grammar may take with each token, and in a step with others; compile process:
                walks through it.
token_cost      EngineCore: a request whose grammar takes more ends.
mask_threads    EngineCore: masks are made in threads, so that no step waits for one that takes too long.
"""
