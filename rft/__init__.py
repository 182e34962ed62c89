"""RFT: rejection-sampling fine-tuning on a model's own verified answers."""
