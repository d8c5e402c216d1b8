"""Parts that only the training of diffusion LMs uses: answers as blocks of slots, and which slots are masked."""
