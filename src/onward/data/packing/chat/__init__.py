"""Conversations: chat templates of strangers rendered in a sandbox, which tokens are answers, and sequences of them."""
