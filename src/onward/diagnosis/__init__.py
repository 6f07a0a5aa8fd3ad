"""What `onward doctor` looks at: versions, devices, disks, speed, and processes that exchange tensors."""
