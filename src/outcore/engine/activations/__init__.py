"""What calls keep of what autograd saves, and where it rests until backward."""
