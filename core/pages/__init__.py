"""What report pages of every stage share."""
