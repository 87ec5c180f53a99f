"""Connections between agents and the coordinator.

WebSocket server and client, authentication, TLS, the in-process link.
"""
