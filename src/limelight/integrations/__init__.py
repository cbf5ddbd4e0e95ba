"""limelight inside other libraries, one file each; importing one imports that library."""
