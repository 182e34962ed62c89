"""Put a run's model or adapter on the Hugging Face hub, with its card."""
