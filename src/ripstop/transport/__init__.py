"""Connections between agents and the coordinator.

WebSocket server and client, pre-authentication, TLS, the in-process link.
"""
