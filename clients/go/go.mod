module onward.example/device

go 1.19
