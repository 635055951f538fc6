"""Connections between processes of one run or one service: mutual proof, sealed messages, framing, and a port that strangers cannot crowd."""
