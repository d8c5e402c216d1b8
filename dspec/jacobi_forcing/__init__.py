"""What Jacobi Forcing alone needs: noise schedules, packed rows, teachers."""
