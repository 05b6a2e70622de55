"""vLLM engines: their processes, environment, memory and ways of speculating."""
