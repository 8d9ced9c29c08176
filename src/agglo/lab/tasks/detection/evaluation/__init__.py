"""Box and mask AP, and how sure they are."""
