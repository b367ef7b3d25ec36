"""Broker: records, run log, task queue, leases and the weight channel on NATS JetStream."""
