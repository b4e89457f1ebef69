"""Who may ask this server, from where, and how much at once."""
