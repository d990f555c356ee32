"""The processes of a rank group, which run each request in lock-step: its ranks, and the broker by which they meet.

A group's answer is right if all ranks ran the same requests in the same order, and no one notices where they did not:
so a rank runs nothing of its own, and ends as soon as it sees that it is not in step.
"""
