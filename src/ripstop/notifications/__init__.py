"""Messages about a job to a webhook (`--notify-url`): `content` writes the text, `webhook` sends it."""
