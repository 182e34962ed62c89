"""Write the model of a run as a GGUF file, which llama.cpp and ollama run."""
