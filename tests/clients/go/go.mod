module onward.example/against_python

go 1.19

require onward.example/device v0.0.0

replace onward.example/device => ../../../clients/go
