"""The recipe: one YAML file that is one whole run. Nothing here imports torch or vLLM."""
