"""RFT: rejection-sampling fine-tuning."""
