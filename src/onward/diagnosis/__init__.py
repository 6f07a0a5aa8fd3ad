"""What `onward doctor` looks at: versions, devices, disks, speed, and communication between processes."""
