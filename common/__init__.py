"""What the algorithms share. Knows none of them."""
