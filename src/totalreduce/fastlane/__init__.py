"""The fast lane: operations between ranks of one host, without messages and in one compiled function."""
