"""The parts that the algorithms share. They know none of them."""
