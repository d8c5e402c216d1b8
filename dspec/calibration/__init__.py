"""Sequential Temperature Scaling, and the stage that fits it."""
