"""An engine under load: measured, and predicted from traces recorded at one concurrency."""
