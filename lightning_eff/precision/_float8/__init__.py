"""What `precision/float8` alone needs: its layer, and the choice of layers."""
