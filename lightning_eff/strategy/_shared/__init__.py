"""What both strategies that divide a model need."""
