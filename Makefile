# The same tasks as `python3 dev.py …`, for those who have make.
.PHONY: demo test test-oldest style quality quality-bench

PYTHON ?= python3

demo:
	$(PYTHON) dev.py demo

test:
	$(PYTHON) dev.py test

test-oldest:
	$(PYTHON) dev.py test --oldest

style:
	$(PYTHON) dev.py style

quality:
	$(PYTHON) dev.py quality

quality-bench:
	$(PYTHON) dev.py quality-bench
