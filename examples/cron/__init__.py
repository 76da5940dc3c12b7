"""A nightly job with natural keys: each invoice that is due is charged once, however often the job runs. See README.md."""
