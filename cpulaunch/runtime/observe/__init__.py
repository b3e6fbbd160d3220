"""What a rank notes of itself.  Changes nothing that a script computes."""
