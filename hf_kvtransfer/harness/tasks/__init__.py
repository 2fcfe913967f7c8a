"""Tasks of lm-evaluation-harness that need no network: stories with questions, cloze, and plain text."""
