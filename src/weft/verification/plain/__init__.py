"""What the one-device reference computes with: definitions in plain torch, and laws for what is
drawn once and given to both sides."""
