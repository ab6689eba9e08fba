"""What event files tell, after the fact: for a terminal, as a page, and packed for an issue."""
