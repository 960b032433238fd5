"""What is measured, and how it is kept: every figure anybody reads is generated from records."""
