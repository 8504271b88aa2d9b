"""What is shown: the magic, the view, its wire format and its static forms. Decides nothing about traces."""
