"""SFT: supervised fine-tuning on given answers, such as a first stage before rewards."""
