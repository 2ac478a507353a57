"""What a person looks at: the banner and closing table on the terminal, and the learning curve as a picture."""
