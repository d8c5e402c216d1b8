"""Parts that only Jacobi Forcing uses: noise schedules, packed rows, teachers."""
