"""The devices that JAX can run on or compile for, as the cost model knows them.

In: nothing, or a device's name. Out: a ``costmodel.DeviceSpec`` of the machine at hand (``detect``), one
whose rates were measured through XLA (``calibrate``), or a program compiled for a device that is not there
(``compile_only``). Open ``detect`` first.
"""
