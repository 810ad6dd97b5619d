"""Small jobs that are disturbed in every way for as long as one likes, and compared with uninterrupted ones."""
