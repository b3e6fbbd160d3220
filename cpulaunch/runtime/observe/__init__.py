"""What a rank records about itself.  Nothing here changes what a script computes."""
