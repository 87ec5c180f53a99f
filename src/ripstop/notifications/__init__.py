"""Messages about a job to a webhook (`--notify-url`): `content` decides what is said, `webhook` sends it."""
