"""What runs other packages' models on this package's attention."""
