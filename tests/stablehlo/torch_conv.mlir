module @jit_func attributes {jax.uses_shape_polymorphism = false, mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<16x3x3x3xf32>, %arg1: tensor<16xf32>, %arg2: tensor<32x16x3x3xf32>, %arg3: tensor<32xf32>, %arg4: tensor<10x128xf32>, %arg5: tensor<10xf32>, %arg6: tensor<16x3x16x16xf32>) -> (tensor<16x10xf32> {jax.result_info = "result[0]"}) {
    %cst = stablehlo.constant dense<4.000000e+00> : tensor<f32>
    %cst_0 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %cst_1 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %cst_2 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %0 = stablehlo.convolution(%arg6, %arg0) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<16x3x16x16xf32>, tensor<16x3x3x3xf32>) -> tensor<16x16x16x16xf32>
    %1 = stablehlo.reshape %arg1 : (tensor<16xf32>) -> tensor<1x16x1x1xf32>
    %2 = stablehlo.broadcast_in_dim %1, dims = [0, 1, 2, 3] : (tensor<1x16x1x1xf32>) -> tensor<16x16x16x16xf32>
    %3 = stablehlo.add %0, %2 : tensor<16x16x16x16xf32>
    %4 = call @relu(%3) : (tensor<16x16x16x16xf32>) -> tensor<16x16x16x16xf32>
    %5 = stablehlo.convolution(%4, %arg2) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], window = {stride = [2, 2], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<16x16x16x16xf32>, tensor<32x16x3x3xf32>) -> tensor<16x32x8x8xf32>
    %6 = stablehlo.reshape %arg3 : (tensor<32xf32>) -> tensor<1x32x1x1xf32>
    %7 = stablehlo.broadcast_in_dim %6, dims = [0, 1, 2, 3] : (tensor<1x32x1x1xf32>) -> tensor<16x32x8x8xf32>
    %8 = stablehlo.add %5, %7 : tensor<16x32x8x8xf32>
    %9 = call @relu_0(%8) : (tensor<16x32x8x8xf32>) -> tensor<16x32x8x8xf32>
    %10 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<f32>
    %11 = "stablehlo.reduce_window"(%9, %10) <{window_dimensions = array<i64: 1, 1, 2, 2>, window_strides = array<i64: 1, 1, 2, 2>}> ({
    ^bb0(%arg7: tensor<f32>, %arg8: tensor<f32>):
      %28 = stablehlo.maximum %arg7, %arg8 : tensor<f32>
      stablehlo.return %28 : tensor<f32>
    }) : (tensor<16x32x8x8xf32>, tensor<f32>) -> tensor<16x32x4x4xf32>
    %12 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<f32>
    %13 = "stablehlo.reduce_window"(%11, %12) <{window_dimensions = array<i64: 1, 1, 2, 2>, window_strides = array<i64: 1, 1, 2, 2>}> ({
    ^bb0(%arg7: tensor<f32>, %arg8: tensor<f32>):
      %28 = stablehlo.add %arg7, %arg8 : tensor<f32>
      stablehlo.return %28 : tensor<f32>
    }) : (tensor<16x32x4x4xf32>, tensor<f32>) -> tensor<16x32x2x2xf32>
    %14 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<16x32x2x2xf32>
    %15 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<16x32x2x2xf32>
    %16 = stablehlo.multiply %14, %15 : tensor<16x32x2x2xf32>
    %17 = stablehlo.divide %13, %16 : tensor<16x32x2x2xf32>
    %18 = stablehlo.reshape %17 : (tensor<16x32x2x2xf32>) -> tensor<16x128xf32>
    %19 = stablehlo.transpose %arg4, dims = [1, 0] : (tensor<10x128xf32>) -> tensor<128x10xf32>
    %20 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<10xf32>
    %21 = stablehlo.multiply %arg5, %20 : tensor<10xf32>
    %22 = stablehlo.dot_general %18, %19, contracting_dims = [1] x [0] : (tensor<16x128xf32>, tensor<128x10xf32>) -> tensor<16x10xf32>
    %23 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<16x10xf32>
    %24 = stablehlo.multiply %23, %22 : tensor<16x10xf32>
    %25 = stablehlo.broadcast_in_dim %21, dims = [1] : (tensor<10xf32>) -> tensor<1x10xf32>
    %26 = stablehlo.broadcast_in_dim %25, dims = [0, 1] : (tensor<1x10xf32>) -> tensor<16x10xf32>
    %27 = stablehlo.add %26, %24 : tensor<16x10xf32>
    return %27 : tensor<16x10xf32>
  }
  func.func private @relu(%arg0: tensor<16x16x16x16xf32>) -> tensor<16x16x16x16xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<16x16x16x16xf32>
    %1 = stablehlo.maximum %arg0, %0 : tensor<16x16x16x16xf32>
    return %1 : tensor<16x16x16x16xf32>
  }
  func.func private @relu_0(%arg0: tensor<16x32x8x8xf32>) -> tensor<16x32x8x8xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<16x32x8x8xf32>
    %1 = stablehlo.maximum %arg0, %0 : tensor<16x32x8x8xf32>
    return %1 : tensor<16x32x8x8xf32>
  }
}
