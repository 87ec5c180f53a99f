"""Connections between agents and the coordinator: WebSocket, authentication, TLS, and the link in one process."""
